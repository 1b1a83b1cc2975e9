"""The built-in checks: one module each, found by healthd.agent.settings.registry."""
