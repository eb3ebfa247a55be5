"""What travels: bodies, routes, frames, problem documents. No sockets."""
