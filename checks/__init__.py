"""The built-in checks, one per module. healthd.agent.settings.registry finds them."""
