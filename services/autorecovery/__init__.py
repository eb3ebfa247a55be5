"""Autorecovery: finds missing copies and abandoned ledgers, and repairs them. Keeps no state."""
