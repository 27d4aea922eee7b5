output "kms_key_arn" {
  description = "Key that encrypts the run's data."
  value       = aws_kms_key.this.arn
}

output "secret_arns" {
  description = "Parameter with the secret key of each role."
  value       = { for role, parameter in aws_ssm_parameter.secret : role => parameter.arn }
}
