"""Shows a job as numbers, for Prometheus and for OpenTelemetry."""
