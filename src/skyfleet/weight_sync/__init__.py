"""Weight sync: push the learner's weights to the engines and verify them."""
