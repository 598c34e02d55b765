"""What the sites run."""
