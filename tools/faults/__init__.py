"""The fault campaign: faults injected into real processes, and what each one costs."""
