output "group_name" {
  description = "The auto-scaling group."
  value       = aws_autoscaling_group.this.name
}

output "user_data" {
  description = "What a machine reads at its first boot."
  value       = module.node.user_data
}
