"""What travels between processes: values, messages, channels."""
