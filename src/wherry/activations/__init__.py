"""What a forward keeps for its backward: recomputed, put away, or shared out."""
