"""BP-46's two scenarios on real processes, with and without what protects from them."""
