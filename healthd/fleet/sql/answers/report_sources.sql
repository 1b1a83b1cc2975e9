-- Coverage of each source, for the report.

SELECT cluster, source, from_time, to_time, names, rows_read, rows_unread, read_time
FROM sources_coverage
ORDER BY cluster, source, from_time, to_time, names, rows_read, rows_unread, read_time
