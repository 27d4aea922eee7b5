"""What is stored of the steps that an agent acts, and how a batch of it is read. Agents hold one of these."""
