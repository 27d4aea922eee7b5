output "group_name" {
  description = "Auto-scaling group of the actors."
  value       = aws_autoscaling_group.this.name
}

output "user_data" {
  description = "What an actor machine reads at its first boot."
  value       = module.node.user_data
}
