"""Who may ask a replica what: clients by their keys, pages of other origins, operators."""
