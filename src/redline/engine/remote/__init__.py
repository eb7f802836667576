"""An engine in another process: the client that stands for it here, and the service that answers there."""
