"""The learner's side of control: who is in the run, what each may do and shall play."""
