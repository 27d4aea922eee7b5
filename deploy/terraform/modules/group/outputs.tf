output "group_name" {
  description = "The auto-scaling group."
  value       = aws_autoscaling_group.this.name
}

output "user_data" {
  description = "User data of a machine."
  value       = module.node.user_data
}
