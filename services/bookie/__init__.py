"""The bookie: stores entries in append-only files and keeps its promises."""
