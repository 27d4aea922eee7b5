output "group_name" {
  description = "Auto-scaling group of the learner."
  value       = aws_autoscaling_group.this.name
}

output "address" {
  description = "Public address of TensorBoard; empty without one."
  value       = var.public ? aws_eip.this[0].public_ip : ""
}

output "address_allocation_id" {
  description = "Allocation of the public address; empty without one."
  value       = var.public ? aws_eip.this[0].allocation_id : ""
}

output "user_data" {
  description = "User data of the learner."
  value       = module.node.user_data
}

output "hook" {
  description = "Group and lifecycle hook that delay the end of the learner's machine until it has copied its last checkpoint."
  value       = { group = module.node.name, name = "last-copy" }
}
