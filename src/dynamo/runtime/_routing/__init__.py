"""Who gets a call: decisions over lists of instances, without I/O, time or chance."""
