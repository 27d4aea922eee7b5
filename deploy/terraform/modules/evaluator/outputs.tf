output "group_name" {
  description = "Auto-scaling group of the evaluator."
  value       = aws_autoscaling_group.this.name
}

output "user_data" {
  description = "What the evaluator reads at its first boot."
  value       = module.node.user_data
}
