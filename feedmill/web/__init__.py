"""The web server: pages for people who label streams, and an HTTP endpoint for applications."""
