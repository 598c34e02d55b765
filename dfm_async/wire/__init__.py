"""Communication between processes: values, messages, channels, shared memory."""
