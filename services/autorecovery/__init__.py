"""Autorecovery: finds what lacks copies or a writer, and mends it. Keeps nothing itself."""
