"""Models that several tasks compare."""
