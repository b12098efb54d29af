"""HTTP from clients and operators: the endpoints, the limits of what they accept, and the answers about the fleet."""
