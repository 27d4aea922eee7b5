output "launch_template" {
  description = "Id and newest version of the launch template."
  value = {
    id      = aws_launch_template.this.id
    version = aws_launch_template.this.latest_version
  }
}

output "name" {
  description = "Name of the machines."
  value       = local.name
}

output "user_data" {
  description = "What a machine reads at its first boot."
  value       = local.user_data
}
