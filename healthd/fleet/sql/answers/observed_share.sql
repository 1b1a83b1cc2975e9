-- Observed time of the chosen nodes in [from_time, to_time).
--
-- columns
--   seconds        time of all nodes, observed or not
--   step_seconds   longest time between two Prometheus scrapes; empty if there are no scrapes

WITH parts AS (
  SELECT observed.seconds, observed.observed_seconds, CAST(NULL AS BIGINT) AS step_seconds
  FROM observed
  JOIN chosen_nodes ON chosen_nodes.cluster = observed.cluster AND chosen_nodes.node = observed.node
  UNION ALL
  SELECT 0, 0, step_seconds
  FROM scraped_conditions
)
SELECT
  CAST(coalesce(sum(seconds), 0) AS BIGINT) AS seconds,
  CAST(coalesce(sum(observed_seconds), 0) AS BIGINT) AS observed_seconds, max(step_seconds) AS step_seconds
FROM parts
