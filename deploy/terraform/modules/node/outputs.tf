output "launch_template" {
  description = "ID and newest version of the launch template."
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
  description = "User data of a machine."
  value       = local.user_data
}
