output "log_groups" {
  description = "Log group of each role."
  value       = { for role, group in aws_cloudwatch_log_group.role : role => group.name }
}

output "flow_logs" {
  description = "Destination of the VPC's flow logs; null: none."
  value = var.flow_logs ? {
    log_group_arn = aws_cloudwatch_log_group.flow[0].arn
    role_arn      = aws_iam_role.flow[0].arn
  } : null
}

output "topic_arn" {
  description = "Topic of the alarms."
  value       = aws_sns_topic.alarms.arn
}
