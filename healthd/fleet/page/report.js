// Draws each chart of the page from its JSON. Nothing is fetched, and no text is made code: Vega's expressions are
// interpreted (ast), so that the page forbids eval.
"use strict";
(async () => {
  const options = {mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false,
                   tooltip: {disableDefaultStyle: true}};
  for (const place of document.querySelectorAll("[data-chart]")) {
    try {
      await vegaEmbed(place, JSON.parse(document.getElementById(place.dataset.chart).textContent), options);
    } catch (error) {
      place.textContent = "This chart could not be drawn here; the table below has its numbers.";
      place.className = "undrawn";
      console.error(error);
    }
  }
  document.documentElement.dataset.drawn = "yes";
})();
