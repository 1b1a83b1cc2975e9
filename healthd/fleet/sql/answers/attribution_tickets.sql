-- Tickets of the chosen nodes that were opened in [from_time, to_time).

SELECT tickets.cluster, tickets.node, tickets.opened_time, tickets.closed_time, tickets.text
FROM tickets
JOIN chosen_nodes ON chosen_nodes.cluster = tickets.cluster AND chosen_nodes.node = tickets.node
CROSS JOIN parameters
WHERE tickets.opened_time >= parameters.from_time AND tickets.opened_time < parameters.to_time AND tickets.text IS NOT NULL
ORDER BY tickets.cluster, tickets.node, tickets.opened_time, tickets.closed_time, tickets.text
