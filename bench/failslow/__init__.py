"""The judge of `healthd failslow`: sets of series with a known truth (generate), plain BOCD and a sliding window on the
same sets (baselines), what is found, missed and blamed (score), a public trace (alibaba), and what it costs (cost)."""
