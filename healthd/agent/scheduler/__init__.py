"""When each check runs, and what becomes of its result."""
