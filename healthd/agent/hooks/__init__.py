"""Hooks: the site's programs that run after an event, outside the daemon."""
