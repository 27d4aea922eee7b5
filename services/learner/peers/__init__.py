"""Several learners that share each batch, and may come and go."""
