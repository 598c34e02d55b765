"""A library of adapters, with the parts of federation files that offer them."""
