"""Plain data that every layer above shares."""
