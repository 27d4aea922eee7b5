# Learners that join the one that has the run, and share each batch with it. They keep nothing: one that is lost is
# missed for seconds, and its replacement copies its state from the others. Of the learner's rights they have its key.

module "node" {
  source = "../node"

  run               = var.run
  image_id          = var.machine.image_id
  root_device       = var.machine.root_device
  security_group_id = var.machine.security_group_id
  log_group         = var.machine.log_group
  secret_arn        = var.machine.secret_arn
  public_address    = var.machine.public_address
  role              = "learner-peer"
  instance_type     = var.instance_type
  disk_gb           = var.disk_gb
}

resource "aws_autoscaling_group" "this" {
  name                      = module.node.name
  min_size                  = 0
  max_size                  = var.machines
  desired_capacity          = var.running ? var.machines : 0
  vpc_zone_identifier       = var.subnet_ids
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0" # the run goes on with the learners that there are
  capacity_rebalance        = var.spot

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = var.spot ? 0 : 100
      spot_allocation_strategy                 = "price-capacity-optimized"
      on_demand_allocation_strategy            = "lowest-price"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = module.node.launch_template.id
        version            = module.node.launch_template.version
      }
    }
  }

  dynamic "tag" {
    for_each = merge(var.run.tags, { Name = module.node.name, Role = "learner-peer" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = false # the launch template tags machines
    }
  }
}
