"""How the positions are built: eager alone, as the work is small and reads values on the host."""
