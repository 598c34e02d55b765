"""Pipeline and federation in, plan out: checks, placement, nets. Pure."""
