output "tensorboard_url" {
  description = "Where TensorBoard is; without tensorboard_cidrs, after starting session_manager_commands.tensorboard."
  value       = local.public_tensorboard ? "http://${module.learner.address}:6006" : "http://localhost:6006"
}

output "session_manager_commands" {
  description = "A shell on the learner, TensorBoard on this computer, and any role's machines."
  value = {
    tensorboard = "aws ssm start-session --region ${local.region} --target $(${local.find_learner}) --document-name AWS-StartPortForwardingSession --parameters portNumber=6006,localPortNumber=6006"
    learner     = "aws ssm start-session --region ${local.region} --target $(${local.find_learner})"
    machines    = "aws ec2 describe-instances --region ${local.region} --filters Name=tag:Run,Values=${var.run} Name=instance-state-name,Values=running --query 'Reservations[].Instances[].[InstanceId,InstanceType,PrivateIpAddress,Tags[?Key==`Role`]|[0].Value]' --output table"
    logs        = "aws logs tail --region ${local.region} --follow ${module.observability.log_groups["learner"]}"
  }
}

locals {
  find_learner = "aws autoscaling describe-auto-scaling-groups --region ${local.region} --auto-scaling-group-names ${module.learner.group_name} --query 'AutoScalingGroups[0].Instances[0].InstanceId' --output text"
}

output "hourly_cost_usd" {
  description = "Estimate per hour, and its parts, from the example prices in prices.json (hourly_prices_usd replaces them), without traffic. A part is null, and the total too, where a price is not known (hourly_prices_usd)."
  value = {
    total = try(floor(sum(values(local.cost_parts_usd)) * 1000 + 0.5) / 1000, null)
    parts = { for part, usd in local.cost_parts_usd : part => try(floor(usd * 1000 + 0.5) / 1000, null) }
  }
}

output "bucket" {
  description = "Bucket with checkpoints, TensorBoard events and videos, under runs/RUN/."
  value       = module.artifacts.bucket
}

output "learner_address" {
  description = "Control address of the learner within the VPC."
  value       = local.run.learner
}

output "actor_machines" {
  description = "Actor machines that actors and actors_per_machine come to."
  value       = local.actor_machines
}

output "groups" {
  description = "Auto-scaling groups by role."
  value = merge(
    {
      learner   = module.learner.group_name
      replay    = module.replay.group_names
      actor     = module.actors.group_name
      evaluator = var.evaluator ? module.evaluator[0].group_name : ""
    },
    { for peers in module.learner_peers : "learner-peer" => peers.group_name },
  )
}

output "user_data" {
  description = "What machines read at their first boot, by role: no secrets."
  value = merge(
    {
      learner   = module.learner.user_data
      replay    = module.replay.user_data
      actor     = module.actors.user_data
      evaluator = var.evaluator ? module.evaluator[0].user_data : ""
    },
    { for peers in module.learner_peers : "learner-peer" => peers.user_data },
  )
}
