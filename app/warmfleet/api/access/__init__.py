"""Access to a replica: clients by their keys, pages of other origins, operators."""
