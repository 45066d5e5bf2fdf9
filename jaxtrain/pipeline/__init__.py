"""Pipelines: schedules are tables made on the host, one executor runs any of them."""
