"""Tables in memory that all processes of a host share: their layout, their life, their cleaning up."""
