// Draws each chart on the page from its JSON. Nothing is fetched, and no text becomes code: Vega's expressions are
// interpreted (ast), so that the page forbids eval.
"use strict";
(async () => {
  const options = {mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false,
                   tooltip: {disableDefaultStyle: true}};
  for (const place of document.querySelectorAll("[data-chart]")) {
    try {
      const spec = JSON.parse(document.getElementById(place.dataset.chart).textContent);
      spec.config.legend.columns = Math.min(4, Math.max(1, Math.floor((place.clientWidth - 100) / 150)));
      await vegaEmbed(place, spec, options);
    } catch (error) {
      place.textContent = "This chart could not be drawn here; the table below has its numbers.";
      place.className = "undrawn";
      console.error(error);
    }
  }
  document.documentElement.dataset.drawn = "yes";
})();
