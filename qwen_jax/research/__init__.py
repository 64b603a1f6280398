"""Research on routing: interventions, further routers, and what they do to a model."""
