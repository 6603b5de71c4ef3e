"""What operators see: metrics, traces, health, and the server that shows them."""
