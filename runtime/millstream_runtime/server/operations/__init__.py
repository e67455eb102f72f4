"""Operations: readiness, drain, metrics, traces, live configuration."""
