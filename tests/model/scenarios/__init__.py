"""Golden traces: what the machines do in situations that have a name, to be read by people."""
