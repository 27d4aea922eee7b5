output "group_ids" {
  description = "Security group of each role."
  value       = { for role, group in aws_security_group.this : role => group.id }
}
