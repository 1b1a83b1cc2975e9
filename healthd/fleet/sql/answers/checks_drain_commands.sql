-- Times at which healthd sent the command that drains a node.

SELECT cluster, node, time
FROM lines
WHERE event = 'drain' AND stage = 'sent'
ORDER BY cluster, node, time
