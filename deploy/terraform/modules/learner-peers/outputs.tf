output "group_name" {
  description = "Auto-scaling group of the learners that join."
  value       = aws_autoscaling_group.this.name
}

output "user_data" {
  description = "What such a machine reads at its first boot."
  value       = module.node.user_data
}
