"""Write an HTML report of recent results."""
